/* Unpacks Plotly, and draws every chart of the page; one that is folded away when it is opened. Colours stand in the charts as the style sheet's variables,
   var(--blue): looked up here, and again when the screen turns dark or light. */
const CONFIG = {
  responsive: true, displaylogo: false, doubleClick: "reset", typesetMath: false,
  modeBarButtons: [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
  plotlyServerURL: "", // of the buttons left out one sends the chart to Plotly's servers
  toImageButtonOptions: { format: "svg" },
};
const AXIS = {
  tickangle: 0, ticklabelstandoff: 4, gridcolor: "var(--line)", zeroline: false, linecolor: "var(--line)", automargin: true,
  title: { standoff: 8, font: { color: "var(--soft)" } },
};
const LAYOUT = {
  margin: { l: 56, r: 12, t: 8, b: 44 }, hovermode: "closest", barmode: "group",
  paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
  font: { family: "system-ui, sans-serif", size: 12, color: "var(--soft)" },
  hoverlabel: { bgcolor: "var(--card)", bordercolor: "var(--line)", font: { color: "var(--ink)" } },
  legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" }, showlegend: true,
  modebar: { bgcolor: "rgba(0,0,0,0)", color: "var(--soft)", activecolor: "var(--ink)" },
  xaxis: AXIS, yaxis: AXIS,
};
function coloured(value, style) {
  if (Array.isArray(value)) return value.map(each => coloured(each, style));
  if (value !== null && typeof value === "object")
    return Object.fromEntries(Object.entries(value).map(([key, each]) => [key, coloured(each, style)]));
  const found = typeof value === "string" && value.match(/^var\((--[a-z]+)\)$/);
  return found ? style.getPropertyValue(found[1]).trim() : value;
}
function notDrawn(place, reason) {
  place.classList.add("missing");
  place.textContent = `This chart is not drawn: ${reason}.`;
}
function draw() {
  const style = getComputedStyle(document.documentElement);
  for (const place of document.querySelectorAll(".chart:not(.missing)")) {
    if (place.offsetParent === null) continue; // folded away: it has no width yet
    try {
      const figure = JSON.parse(place.nextElementSibling.textContent);
      const layout = { ...figure.layout, template: { layout: LAYOUT } };
      Plotly.react(place, coloured(figure.data, style), coloured(layout, style), CONFIG);
    } catch (error) {
      notDrawn(place, error);
    }
  }
}
async function unpack() {
  const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), each => each.charCodeAt(0));
  const script = document.createElement("script");
  script.textContent = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  document.head.append(script);
}
unpack().then(() => {
  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  document.addEventListener("toggle", draw, true);
}, error => {
  const reason = "DecompressionStream" in window ? error : "it needs a browser of 2023 or later";
  for (const place of document.querySelectorAll(".chart")) notDrawn(place, reason);
});
