"""Ratios in one run: nearflash against the limit of the machine and against the tools that a user would pick.

``python -m bench --out bench-out`` runs every page, ``python -m bench cold`` one. A page is one module (:mod:`.cold`,
:mod:`.warm_tokens`, :mod:`.warm_samples`) that opens a :class:`~bench.figure.Figure`: cases of the same work.
:mod:`.runner` runs them interleaved, :mod:`.summary` makes ratios, :mod:`.table` and :mod:`.plot` show them.
"""
