"""`sizing ui`: a page on which a scenario is asked about; Streamlit draws it."""
