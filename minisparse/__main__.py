"""``python -m minisparse``: print the configuration."""

from .runtime import show_config

show_config()
