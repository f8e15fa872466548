"""What the example manifests read: data, tokenizers, model configs and evaluation rules, one package per task.

A manifest names a file here as `package://rlhf_examples/<task>/<file>` and a function as
`rlhf_examples.<task>.<module>:<function>`, so the same manifest runs on a laptop and in a pod.
"""
