"""A household-help task, small enough to learn on a CPU.

A user asks how to do something to a thing ("How do I clean my kettle?"). A good answer opens courteously, gives three
ordered steps about that very thing, and offers more help. Preference pairs follow a rule (`rule.score`) that the
reward model never sees, so training can be checked against the truth.

    task.py                       templates, and a seeded generator of prompts, responses and preference pairs
    rule.py                       the rule behind the preferences; the manifests evaluate with it
    train.jsonl, heldout.jsonl    columns of Dahoas/full-hh-rlhf: prompt, response, chosen, rejected
    safety.py                     which actions are dangerous, for Safe RLHF
    safety_{train,heldout}.jsonl  pairs of a safer and a more dangerous response, and whether each is safe
    model/                        config and tokenizer of a 0.75 M parameter Llama, without weights

`examples/make_helpful.py` writes the JSON files.
"""
