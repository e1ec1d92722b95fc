"""Command line of ltconvert."""

import typer

app = typer.Typer(name="ltconvert", no_args_is_help=True)


def main() -> None:
    """Run the command line."""
    app()
