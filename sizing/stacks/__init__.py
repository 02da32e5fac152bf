"""Plans in the terms of the engines and serving stacks that people run, and back."""
