"""The soak: many random faults on one host, and many short tests; nothing is lost, nothing leaks.

python -m pytest_smp.soak --backend gloo --faults 1000
python -m pytest_smp.soak --backend gloo --tests 10000
"""
