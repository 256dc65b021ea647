"""One call, from top to bottom: its arguments, the problem, the choice, what runs."""
