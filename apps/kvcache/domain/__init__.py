"""Pure KV bookkeeping. Imports only the standard library, numpy and this package; time is an argument."""
