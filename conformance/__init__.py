"""The promises of the SMP API as properties, run against any backend.

Each room is a package, and imports only from the rooms before it::

    engines        what trains: the protocol, the built-in adapters, what an engine may claim
    requirements   the promises, each with its sentence, source, level and needs
    session        one session of pytest: options, verdicts, report, expected failures, certification
    cases          what properties draw, and what must come of it
    suite          the properties: `pytest --pyargs conformance`
    mutants        planted bugs, each of which the suite must catch

``expected/`` holds expected failures of backends of others, ``report.schema.json`` the schema of the report.
"""
