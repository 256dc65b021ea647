"""Fields: single figures in texts."""

from __future__ import annotations

import re

#: A field of a page, and what stands in it.
FIELD = re.compile(r"<!-- figure: ([^>]*?) -->(.*?)<!-- /figure -->", re.DOTALL)
