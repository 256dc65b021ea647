"""What measures for the project's pages, and makes them; outside the wheel. ``python -m report`` lists the commands."""
