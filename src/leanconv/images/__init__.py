"""``filter2d`` and its relatives: image filters, and what they share."""
