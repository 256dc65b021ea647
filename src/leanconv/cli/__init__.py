"""The command line: ``leanconv doctor | bench | filter | explain | precompile | tune | cache | demo``."""
