"""Tuning: candidates timed once, tables of their times, and the recorder of problems that no table has.

NOTE: as an attribute of leanconv, ``tuning`` was the function that is `record_tuning` now.
"""
