"""Run commands, and the project's own suite, in the places where users will run it."""
