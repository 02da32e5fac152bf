"""`sizing ui`: the page on which scenarios are planned and compared."""

from __future__ import annotations

from typing import Annotated

from typer import Option


def ui(
    host: Annotated[str, Option(help="Address to listen on; the default is this machine only")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, Option(help="Port to listen on")] = 8501,
) -> None:
    """
    Serve a page on which scenarios are planned and compared, until Ctrl-C.

    Needs Streamlit, which the extra `ui` installs. The page loads nothing from the internet.
    """
    from sizing.ui.serve import serve

    serve(host, port)
