"""Tags between which a response thinks before it answers."""

import re

TAGS = "think|thinking|thought|reasoning"
OPENING, CLOSING = (
    rf"(?:<{end}(?i:{TAGS})>|\[{end}THINK\]|\u25c1{end}think\u25b7|<{end}seed:think>)" for end in ("", "/")
)
"""Patterns of the tags; Magistral, Kimi and Seed-OSS write other ones than `<think>`."""
REST = rf"(?:(?!{OPENING}).)*{CLOSING}"
THOUGHTS = re.compile(rf"(?s){OPENING}.*?{CLOSING}(?:{REST})?|\A{REST}|{OPENING}.*\Z")
"""Pattern of a thought: from tag to tag, up to a tag (the prompt has begun the thought), or from a tag to the end."""
BEGUN = re.compile(rf"({OPENING})\s*({CLOSING}\s*)?\Z")
"""Pattern of the end of a prompt that begins a thought, whose second group is there if the thought also ends."""
