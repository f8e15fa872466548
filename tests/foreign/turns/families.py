r"""Chat templates in the manner of those that people have, written by hand in small, and a tokenizer for each.

The comments name the models whose template does the same. `{{ '\n' }}` stands where a line break after a block would
be trimmed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

NEW_LINE = "{{ '\\n' }}"
CALLS = (
    "{% for call in m.tool_calls or [] %}{{ '\\n' }}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}"
)
CONTENT = "{% if m.content %}{{ '\\n' + m.content }}{% endif %}"
# Qwen 2.5, Hermes: every message stays as it is, calls are JSON.
CHATML = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}<|im_end|>"
    f"{NEW_LINE}{{% endif %}}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
    f"</tool_response><|im_end|>{NEW_LINE}"
    f"{{% else %}}<|im_start|>{{{{ m.role }}}}{CONTENT}{CALLS}<|im_end|>{NEW_LINE}{{% endif %}}{{% endfor %}}"
    f"{{% if add_generation_prompt %}}<|im_start|>assistant{NEW_LINE}{{% endif %}}"
)
# Qwen 3: thoughts before the last question are left out; the last answer always has a block of thoughts.
THINKING = CHATML.replace(
    CONTENT,
    "{% set answer = m.content.split('</think>')[-1].lstrip('\\n') %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') if '</think>' in m.content "
    "else '' %}"
    "{% if m.role == 'assistant' and loop.index0 > ns.last and loop.last %}"
    "{{ '\\n<think>\\n' + thought + '\\n</think>\\n\\n' + answer }}"
    "{% elif answer %}{{ '\\n' + answer }}{% endif %}",
)
# Phi-3: roles that it does not know vanish; a conversation that ends has another token after the turn's.
PHI = (
    "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant'] %}<|{{ m.role }}|>\n{{ m.content }}<|end|>"
    f"{NEW_LINE}{{% endif %}}{{% endfor %}}"
    f"{{% if add_generation_prompt %}}<|assistant|>{NEW_LINE}{{% else %}}{{{{ eos_token }}}}{{% endif %}}"
)
# Gemma 2: its own names of roles, no system; contents are trimmed.
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}"
    f"<end_of_turn>{NEW_LINE}{{% endfor %}}"
    f"{{% if add_generation_prompt %}}<start_of_turn>model{NEW_LINE}{{% endif %}}"
)
# Llama 3: what a tool says is written as JSON, a call as JSON with "parameters".
LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}"
    "<|end_header_id|>{{ '\\n\\n' }}"
    '{% if m.tool_calls %}{"name": "{{ m.tool_calls[0].function.name }}", '
    '"parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "{% elif m.role == 'tool' %}{{ m.content | tojson }}{% else %}{{ m.content | trim }}{% endif %}"
    "<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>{{ '\\n\\n' }}{% endif %}"
)
# DeepSeek R1: calls need None as content and arguments as text; prompts end otherwise than answers begin.
R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}"
    "{% elif m.role == 'tool' %}<|Tool|>{{ m.content }}"
    "{% elif m.role == 'assistant' and m.content is none %}<|Assistant|>{% for call in m.tool_calls %}"
    "{{ call.function.name + ': ' + call.function.arguments }}{% endfor %}{{ eos_token }}"
    "{% elif m.role == 'assistant' %}<|Assistant|>{{ m.content.split('</think>')[-1] }}{{ eos_token }}{% endif %}"
    f"{{% endfor %}}{{% if add_generation_prompt %}}<|Assistant|><think>{NEW_LINE}{{% endif %}}"
)
# Mistral: the roles of the user and of answers without a call alternate; a space before an answer is a part of it.
MISTRAL = (
    "{{ bos_token }}{% set ns = namespace(n=0) %}{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and m.tool_calls is not defined) %}"
    "{% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.n = ns.n + 1 %}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.tool_calls is defined %}[TOOL_CALLS] {{ m.tool_calls | map(attribute='function') | list | tojson }}"
    "{{ eos_token }}{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content }} [/TOOL_RESULTS]"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
# GLM-4: nothing ends a turn but the role of the next one.
GLM = (
    "{% for m in messages %}<|{{ m.role }}|>{{ '\\n' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# GPT-OSS: the last answer ends otherwise than earlier ones.
HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
# Cohere 2: two tokens close an answer, and only the second one ends the turn.
COHERE = (
    "{% for m in messages %}<|START|><|{{ m.role }}|>"
    "{{ '<|OPEN|>' + m.content + '<|CLOSE|>' if m.role == 'assistant' else m.content }}<|STOP|>{% endfor %}"
    "{% if add_generation_prompt %}<|START|><|assistant|><|OPEN|>{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class Family:
    """A template with its special tokens, and what has to come of it."""

    template: str
    special: Sequence[str]
    eos: str
    listed: Sequence[str] = ()
    """Tokens that the model's generation_config.json lists."""
    ends: Sequence[str]
    """Tokens that end a response, that of the template first."""
    learned: Sequence[str]
    """Texts that are learned of the conversation TALK: both answers, or the last one of two."""
    call: str = ""
    """Text that is learned of the call in TOOL_TALK; empty: the template cannot write it."""


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call><|im_end|>'
FAMILIES = {
    "chatml": Family(
        template=CHATML,
        special=["<|im_start|>", "<|im_end|>"],
        eos="<|im_end|>",
        ends=["<|im_end|>"],
        learned=["7<|im_end|>", "2<|im_end|>"],
        call=CALL,
    ),
    "chatml on a base model": Family(
        template=CHATML,
        special=["<|im_start|>", "<|im_end|>"],
        eos="<|endoftext|>",
        ends=["<|im_end|>", "<|endoftext|>"],
        learned=["7<|im_end|>", "2<|im_end|>"],
        call=CALL,
    ),
    "thinking": Family(
        template=THINKING,
        special=["<|im_start|>", "<|im_end|>"],
        eos="<|im_end|>",
        listed=["<|im_end|>", "<|endoftext|>"],
        ends=["<|im_end|>", "<|endoftext|>"],
        learned=["7<|im_end|>", "<think>\n\n</think>\n\n2<|im_end|>"],
        call=CALL,
    ),
    "phi": Family(
        template=PHI,
        special=["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"],
        eos="<|endoftext|>",
        listed=["<|endoftext|>", "<|assistant|>", "<|end|>"],
        ends=["<|end|>", "<|endoftext|>", "<|assistant|>"],
        learned=["7<|end|>", "2<|end|>"],
    ),
    "gemma": Family(
        template=GEMMA,
        special=["<start_of_turn>", "<end_of_turn>"],
        eos="<|endoftext|>",
        ends=["<end_of_turn>", "<|endoftext|>"],
        learned=["7<end_of_turn>", "2<end_of_turn>"],
    ),
    "llama": Family(
        template=LLAMA,
        special=["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"],
        eos="<|endoftext|>",
        listed=["<|endoftext|>", "<|eom_id|>", "<|eot_id|>"],
        ends=["<|eot_id|>", "<|endoftext|>", "<|eom_id|>"],
        learned=["7<|eot_id|>", "2<|eot_id|>"],
        call='{"name": "add", "parameters": {"a": 3, "b": 4}}<|eot_id|>',
    ),
    "r1": Family(
        template=R1,
        special=["<|User|>", "<|Assistant|>", "<|Tool|>"],
        eos="<|endoftext|>",
        ends=["<|endoftext|>"],
        learned=["7<|endoftext|>", "2<|endoftext|>"],
        call='add: {"a": 3, "b": 4}<|endoftext|>',
    ),
    "mistral": Family(
        template=MISTRAL,
        special=["[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"],
        eos="<|endoftext|>",
        ends=["<|endoftext|>"],
        learned=[" 7<|endoftext|>", " 2<|endoftext|>"],
        call='[TOOL_CALLS] [{"name": "add", "arguments": {"a": 3, "b": 4}}]<|endoftext|>',
    ),
    "glm": Family(
        template=GLM,
        special=["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"],
        eos="<|endoftext|>",
        listed=["<|endoftext|>", "<|user|>"],
        ends=["<|endoftext|>", "<|user|>"],
        learned=["\n7<|user|>", "\n2<|endoftext|>"],
    ),
    "harmony": Family(
        template=HARMONY,
        special=["<|start|>", "<|message|>", "<|end|>", "<|return|>"],
        eos="<|return|>",
        ends=["<|return|>"],
        learned=["<|message|>2<|return|>"],
    ),
    "cohere": Family(
        template=COHERE,
        special=["<|START|>", "<|user|>", "<|assistant|>", "<|OPEN|>", "<|CLOSE|>", "<|STOP|>"],
        eos="<|STOP|>",
        ends=["<|STOP|>"],
        learned=["7<|CLOSE|><|STOP|>", "2<|CLOSE|><|STOP|>"],
    ),
}
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "3+4="},
    {"role": "assistant", "content": "7"},
    {"role": "user", "content": "1+1="},
    {"role": "assistant", "content": "2"},
]
ADD = {"type": "function", "function": {"name": "add", "arguments": {"a": 3, "b": 4}}}
TOOL_TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "3+4="},
    {"role": "assistant", "content": "", "tool_calls": [ADD]},
    {"role": "tool", "content": "7"},
    {"role": "assistant", "content": "It is 7."},
]


def tokenizer_of(family: Family) -> PreTrainedTokenizerFast:
    """A token a byte, and one for each special token of the family."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator([], trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False))
    special = ["<pad>", "<s>", "<|endoftext|>", *family.special]
    bpe.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in special])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", bos_token="<s>", eos_token=family.eos)
    tokenizer.chat_template = family.template
    return tokenizer
