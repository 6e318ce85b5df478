"""``python -m halfscale``."""

from halfscale.cli import app

app(prog_name="halfscale")
