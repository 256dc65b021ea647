"""Tuning: candidates timed once, tables of their times, and the recorder of problems that no table has."""
