"""Generated mutants of the gate: the modules that turn reports into verdicts, and the tests that must kill them.

python -m tools.gate_mutants
python -m tools.gate_mutants --module conformance.session.verdicts
"""
