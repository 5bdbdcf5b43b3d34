"""Ratios in one run: nearflash against the limit of the machine and against the tools that a user would pick.

``python -m bench --out bench-out`` runs every page, ``python -m bench cold`` one. A module for each kind of
work (:mod:`.cold`, :mod:`.warm_tokens`, :mod:`.warm_samples`, :mod:`.warm_tables`, :mod:`.indexing`) opens a
:class:`~bench.figure.Figure`: cases that do the same.
:mod:`.runner` runs them interleaved, :mod:`.summary` makes ratios, :mod:`.table` and :mod:`.plot` show them.
"""
