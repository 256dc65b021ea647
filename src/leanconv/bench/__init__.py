"""Suites of problems, the peers they are measured against, and tables of the results."""

from leanconv.bench.results import GROUPS, Results, Row, geometric_mean
from leanconv.bench.run import cases_of, default_path, run_suite
from leanconv.bench.suites import Case, format_problem, load_suite, parse_problem, suite_names, with_batch
from leanconv.bench.tables import show

__all__ = [
    "GROUPS",
    "Case",
    "Results",
    "Row",
    "cases_of",
    "default_path",
    "format_problem",
    "geometric_mean",
    "load_suite",
    "parse_problem",
    "run_suite",
    "show",
    "suite_names",
    "with_batch",
]
