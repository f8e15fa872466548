"""The cluster as the operator meets it: what it sees there (observe) and what it does there (apply)."""
