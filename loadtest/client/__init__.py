"""The load generator: Locust processes, dispatcher, streams and prompts."""
