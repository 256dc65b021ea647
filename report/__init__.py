"""What this project makes of its measurements: pages, figures, and studies that no user runs.

Nothing here is part of the wheel, and no module of leanconv imports it. ``python -m report`` in the repository's root
lists the commands. ``make docs`` runs those that write the pages from the committed results.
"""
