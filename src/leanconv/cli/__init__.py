"""The command line: ``leanconv doctor | bench | filter | explain | cache | demo``."""
