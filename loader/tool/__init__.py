"""The command ``python -m loader``, one module a command; :mod:`.cli` puts them together."""
