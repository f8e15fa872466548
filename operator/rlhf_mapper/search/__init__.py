"""The search of HybridFlow's Algorithm 1 over tables of stage costs."""
