"""The promises of the SMP API as properties, run against any backend."""
