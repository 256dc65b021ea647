"""Tuning: candidates timed once, tables of their times, and the recorder of problems that no table has.

NOTE: nothing is imported here, since `call.choose` reads `tuning.tables`, and the search goes through `call.choose`. As
an attribute of leanconv, ``tuning`` is the function of `tuning.record`.
"""
