"""Endpoints under load: started, asked, timed."""
