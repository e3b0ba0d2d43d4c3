"""The soak: many random faults on one executor, and many short tests; nothing is lost, nothing leaks.

python -m tools.soak --backend gloo --faults 1000
python -m tools.soak --backend gloo --tests 10000
"""
