"""Chat templates in the shapes of well-known models', with marks around what the assistant has to write in its turn.

The marks, ⟦ and ⟧, are set by hand and are written into the text; ``plain`` takes them out, as models come. Each
template is one line, so that marks change no white space.
"""

# ruff: noqa: E501, RUF001

from __future__ import annotations

from dataclasses import dataclass


def plain(marked: str) -> str:
    """A template or a text without marks."""
    return marked.replace("⟦", "").replace("⟧", "")


@dataclass(frozen=True)
class Family:
    marked: str
    tools: bool = False
    """Whether it writes calls of tools and what tools answer."""
    stable: bool = True
    """Whether a conversation begins with what its first messages are as a conversation and as a prompt."""


_USERS = (
    "{% for m in messages %}{% if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
)
_ANSWER = "{% elif m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
_SYSTEM_AND_TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}"
    "{% endif %}{{ '# Tools\n<tools>' }}{% for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}"
    "{{ '\n</tools><|im_end|>\n' }}{% elif messages[0].role == 'system' %}"
    "{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{% endif %}"
)
_TOOL_ANSWERS = (
    "{% elif m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}"
    "{% endif %}{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
)
_CALLS = (
    "{% for call in m.tool_calls or [] %}{% if not loop.first or m.content %}{{ '\n' }}{% endif %}"
    '{% set call = call.function or call %}{{ \'<tool_call>\n{"name": "\' + call.name + \'", "arguments": \' }}'
    "{% if call.arguments is string %}{{ call.arguments }}{% else %}{{ call.arguments | tojson }}{% endif %}"
    "{{ '}\n</tool_call>' }}{% endfor %}"
)
_LAST_QUERY = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
)
_REASONING = (
    "{% set content = m.content or '' %}{% set reasoning = '' %}{% if m.reasoning_content is string %}"
    "{% set reasoning = m.reasoning_content %}{% elif '</think>' in content %}"
    "{% set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
)
_OFF = "enable_thinking is defined and enable_thinking is false"

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}⟦{% endif %}"
    "{{ m.content + '<|im_end|>' }}{% if m.role == 'assistant' %}⟧{% endif %}{{ '\n' }}{% endfor %}"
    + _PROMPT
    + "{% endif %}"
)
QWEN25 = (
    _SYSTEM_AND_TOOLS + _USERS + _ANSWER + "⟦{{ m.content or '' }}" + _CALLS + "{{ '<|im_end|>' }}⟧{{ '\n' }}"
    + _TOOL_ANSWERS + "{% endif %}{% endfor %}" + _PROMPT + "{% endif %}"
)  # fmt: skip
QWEN3 = (  # thoughts behind the last question alone; an empty one in the last turn
    _SYSTEM_AND_TOOLS + _LAST_QUERY + _USERS + "{% elif m.role == 'assistant' %}" + _REASONING
    + "{{ '<|im_start|>assistant\n' }}{% set off = " + _OFF + " %}"
    "{% if loop.index0 > ns.last and (loop.last or reasoning) %}{% if not off %}⟦{% endif %}{{ '<think>\n' }}"
    "{% if off and reasoning %}⟦{% endif %}{{ reasoning.strip('\n') + '\n</think>\n\n' }}"
    "{% if off and not reasoning %}⟦{% endif %}{{ content.lstrip('\n') }}{% else %}⟦{{ content }}{% endif %}" + _CALLS
    + "{{ '<|im_end|>' }}⟧{{ '\n' }}" + _TOOL_ANSWERS + "{% endif %}{% endfor %}" + _PROMPT + "{% if " + _OFF + " %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)  # fmt: skip
QWEN3_THINKING = (  # the prompt opens the thoughts
    _SYSTEM_AND_TOOLS + _LAST_QUERY + _USERS + "{% elif m.role == 'assistant' %}" + _REASONING
    + "{{ '<|im_start|>assistant\n' }}{% if loop.index0 > ns.last and (loop.last or reasoning) %}{{ '<think>\n' }}⟦"
    "{{ reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}{% else %}⟦{{ content }}{% endif %}" + _CALLS
    + "{{ '<|im_end|>' }}⟧{{ '\n' }}" + _TOOL_ANSWERS + "{% endif %}{% endfor %}" + _PROMPT
    + "{{ '<think>\n' }}{% endif %}"
)  # fmt: skip
HERMES = (  # a system prompt of its own, calls as JSON through a filter
    "{{ bos_token }}{% if tools %}{{ '<|im_start|>system\nYou call functions: ' }}{{ tools | tojson }}{{ '<|im_end|>\n' }}"
    "{% endif %}{% for m in messages %}{% if m.role == 'tool' %}"
    "{{ '<|im_start|>tool\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
    "{% elif m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}⟦{{ m.content or '' }}{% for call in m.tool_calls or [] %}"
    "{{ '\n<tool_call>\n' }}{{ (call.function or call) | tojson }}{{ '\n</tool_call>' }}{% endfor %}{{ '<|im_end|>' }}⟧{{ '\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    + _PROMPT + "{% endif %}"
)  # fmt: skip
_HEADER = "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}" + _HEADER + "{% if m.role == 'assistant' %}⟦{% endif %}"
    "{{ m.content | trim + '<|eot_id|>' }}{% if m.role == 'assistant' %}⟧{% endif %}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)  # fmt: skip
LLAMA31 = (  # a date; a call replaces the content; what tools answer is JSON
    "{{ bos_token }}{{ '<|start_header_id|>system<|end_header_id|>\n\n' }}{% if tools %}{{ 'Environment: ipython\n' }}"
    "{% endif %}{{ 'Today Date: ' + (strftime_now('%d %b %Y') if strftime_now is defined else '26 Jul 2024') + '\n\n' }}"
    "{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% endif %}"
    "{% for tool in tools or [] %}{{ '\n\n' }}{{ tool | tojson(indent=4) }}{% endfor %}{{ '<|eot_id|>' }}"
    "{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    "{% set call = m.tool_calls[0].function or m.tool_calls[0] %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}⟦{{ '{\"name\": \"' + call.name + '\", \"parameters\": ' }}"
    "{{ call.arguments | tojson }}{{ '}<|eot_id|>' }}⟧{% elif m.role == 'tool' %}"
    "{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' }}"
    "{% if m.content is mapping or m.content is iterable %}{{ m.content | tojson }}{% else %}{{ m.content }}{% endif %}"
    "{{ '<|eot_id|>' }}{% elif m.role != 'system' %}" + _HEADER + "{% if m.role == 'assistant' %}⟦{% endif %}"
    "{{ m.content | trim + '<|eot_id|>' }}{% if m.role == 'assistant' %}⟧{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)  # fmt: skip
GEMMA = (  # the system prompt is written into the first question
    "{{ bos_token }}{% set first = '' %}{% set rest = messages %}{% if messages[0].role == 'system' %}"
    "{% set first = messages[0].content + '\n\n' %}{% set rest = messages[1:] %}{% endif %}{% for m in rest %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + (first if loop.first else '') }}"
    "{% if m.role == 'assistant' %}⟦{% endif %}{{ m.content | trim + '<end_of_turn>' }}{% if m.role == 'assistant' %}⟧{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)  # fmt: skip
MISTRAL = (  # the system prompt and the tools stand in the last question; no prompt for the answer
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{% if tools and loop.index0 == ns.last %}"
    "{{ '[AVAILABLE_TOOLS]' }}{{ tools | tojson }}{{ '[/AVAILABLE_TOOLS]' }}{% endif %}{{ '[INST]' }}"
    "{% if messages[0].role == 'system' and loop.index0 == ns.last %}{{ messages[0].content + '\n\n' }}{% endif %}"
    "{{ m.content + '[/INST]' }}{% elif m.tool_calls %}⟦{{ '[TOOL_CALLS] [' }}{% for call in m.tool_calls %}"
    "{{ (call.function or call) | tojson }}{{ ', ' if not loop.last else ']' }}{% endfor %}{{ eos_token }}⟧"
    "{% elif m.role == 'assistant' %}⟦{{ ' ' + m.content | trim + eos_token }}⟧{% elif m.role == 'tool' %}"
    "{{ '[TOOL_RESULTS]' }}{{ {'content': m.content} | tojson }}{{ '[/TOOL_RESULTS]' }}{% endif %}{% endfor %}"
)  # fmt: skip
LLAMA2 = (  # turns in pairs, each between bos and eos
    "{% set first = '' %}{% set rest = messages %}{% if messages[0].role == 'system' %}"
    "{% set first = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' %}{% set rest = messages[1:] %}{% endif %}"
    "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}{% if m.role == 'user' %}"
    "{{ bos_token + '[INST] ' + (first if loop.first else '') + m.content.strip() + ' [/INST]' }}{% else %}"
    "⟦{{ ' ' + m.content.strip() + ' ' + eos_token }}⟧{% endif %}{% endfor %}"
)  # fmt: skip
GPT_OSS = (  # channels; an answer ends otherwise if it is the last one; thoughts go away once there is a final answer
    "{{ '<|start|>system<|message|>Current date: ' + strftime_now('%Y-%m-%d') + '<|end|>' }}"
    "{% set ns = namespace(call='', final=-1) %}{% for m in messages %}{% if m.role == 'assistant' and not m.tool_calls %}"
    "{% set ns.final = loop.index0 %}{% endif %}{% endfor %}"
    "{% if messages[0].role == 'system' or tools %}{{ '<|start|>developer<|message|>' }}{% if messages[0].role == 'system' %}"
    "{{ messages[0].content }}{% endif %}{% for tool in tools or [] %}{{ '\ntype ' + tool.function.name + ' = ' }}"
    "{{ tool.function.parameters | tojson }}{% endfor %}{{ '<|end|>' }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}{% if '<|channel|>' in (m.content or '') %}"
    "{{ raise_exception('You have passed a message containing <|channel|> tags in the content field.') }}{% endif %}"
    "{{ '<|start|>assistant' }}⟦{% if m.tool_calls %}{% if m.content and m.thinking %}"
    "{{ raise_exception('Cannot pass both content and thinking in an assistant message with tool calls!') }}{% endif %}"
    "{% if (m.content or m.thinking) and loop.index0 > ns.final %}{{ '<|channel|>analysis<|message|>' + (m.content or m.thinking) "
    "+ '<|end|><|start|>assistant' }}{% endif %}{% set call = m.tool_calls[0].function or m.tool_calls[0] %}"
    "{% set ns.call = call.name %}{{ ' to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}"
    "{{ call.arguments | tojson }}{{ '<|call|>' }}{% else %}{% if loop.last and m.thinking %}"
    "{{ '<|channel|>analysis<|message|>' + m.thinking + '<|end|><|start|>assistant' }}{% endif %}"
    "{{ '<|channel|>final<|message|>' + m.content }}{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{% endif %}⟧{% elif m.role == 'tool' %}"
    "{{ '<|start|>functions.' + ns.call + ' to=assistant<|channel|>commentary<|message|>' }}{{ m.content | tojson }}{{ '<|end|>' }}"
    "{% elif m.role == 'user' %}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)  # fmt: skip
_DEEPSEEK = (
    "{{ bos_token }}{% set ns = namespace(tool=false) %}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}"
    "{% endfor %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.tool = false %}{{ '<｜User｜>' + m.content }}"
    "{% elif m.role == 'assistant' %}{% if not ns.tool %}{{ '<｜Assistant｜>' }}{% endif %}⟦CONTENT"
    "{% for call in m.tool_calls or [] %}{% set call = call.function or call %}"
    "{{ '<｜tool▁calls▁begin｜>' if loop.first else '\n' }}{{ '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.name + "
    "'\n```json\n' + call.arguments + '\n```<｜tool▁call▁end｜>' }}{{ '<｜tool▁calls▁end｜>' if loop.last else '' }}{% endfor %}"
    "{{ eos_token }}⟧{% set ns.tool = false %}{% elif m.role == 'tool' %}{% set ns.tool = true %}"
    "{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}{% endif %}{% endfor %}"
)  # fmt: skip
DEEPSEEK_V3 = (
    _DEEPSEEK.replace("CONTENT", "{{ m.content or '' }}")
    + "{% if add_generation_prompt and not ns.tool %}{{ '<｜Assistant｜>' }}{% endif %}"
)
DEEPSEEK_R1 = (  # the prompt opens thoughts, and no turn shows them
    _DEEPSEEK.replace("CONTENT", "{{ (m.content or '').split('</think>')[-1] }}")
    + "{% if add_generation_prompt and not ns.tool %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"
)
GLM4 = (
    "{{ '[gMASK]<sop>' }}{% if tools %}{{ '<|system|>\n' }}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<|user|>\n' + m.content }}{% if " + _OFF + " %}{{ '/nothink' }}{% endif %}"
    "{% elif m.role == 'assistant' %}" + _REASONING + _LAST_QUERY.replace("for m in", "for n in").replace("m.role", "n.role")
    + "{{ '<|assistant|>' }}{% set off = " + _OFF + " %}"
    "{% if loop.index0 > ns.last and reasoning %}{% if not off %}⟦{% endif %}{{ '\n<think>' }}{% if off %}⟦{% endif %}"
    "{{ reasoning.strip() + '</think>' }}"
    "{% elif off %}{{ '\n<think></think>' }}⟦{% else %}⟦{{ '\n<think></think>' }}{% endif %}"
    "{% if content.strip() %}{{ '\n' + content.strip() }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{% set call = call.function or call %}{{ '\n<tool_call>' + call.name }}"
    "{% for key, value in call.arguments | items %}{{ '\n<arg_key>' + key + '</arg_key>\n<arg_value>' }}"
    "{{ value if value is string else value | tojson }}{{ '</arg_value>' }}{% endfor %}{{ '\n</tool_call>' }}{% endfor %}⟧"
    "{% elif m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}{% elif m.role == 'system' %}{{ '<|system|>\n' + m.content }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% if " + _OFF + " %}{{ '\n<think></think>' }}"
    "{% endif %}{% endif %}"
)  # fmt: skip
KIMI = (
    "{% if tools %}{{ '<|im_system|>tool_declare<|im_middle|>' }}{{ tools | tojson }}{{ '<|im_end|>' }}{% endif %}"
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}"
    "{{ '<|im_system|>system<|im_middle|>You are a helpful assistant<|im_end|>' }}{% endif %}"
    "{% if m.role == 'system' %}{{ '<|im_system|>system<|im_middle|>' }}{% elif m.role == 'user' %}"
    "{{ '<|im_user|>user<|im_middle|>' }}{% elif m.role == 'assistant' %}{{ '<|im_assistant|>assistant<|im_middle|>' }}⟦"
    "{% elif m.role == 'tool' %}{{ '<|im_system|>tool<|im_middle|>## Return of ' + m.tool_call_id + '\n' }}{% endif %}"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content or [] %}{{ part.text }}{% endfor %}{% endif %}"
    "{% if m.tool_calls %}{{ '<|tool_calls_section_begin|>' }}{% for call in m.tool_calls %}{{ '<|tool_call_begin|>' + call.id + "
    "'<|tool_call_argument_begin|>' }}{% if call.function.arguments is string %}{{ call.function.arguments }}{% else %}"
    "{{ call.function.arguments | tojson }}{% endif %}{{ '<|tool_call_end|>' }}{% endfor %}{{ '<|tool_calls_section_end|>' }}"
    "{% endif %}{{ '<|im_end|>' }}{% if m.role == 'assistant' %}⟧{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}"
)  # fmt: skip
PHI3 = (  # the end of the conversation has a token of its own
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' }}{% if m.role == 'assistant' %}⟦{% endif %}{{ m.content + '<|end|>' }}"
    "{% if m.role == 'assistant' and not loop.last %}⟧{% endif %}{{ '\n' }}{% if loop.last and not add_generation_prompt %}"
    "{{ eos_token }}{% if m.role == 'assistant' %}⟧{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)  # fmt: skip
PHI4 = (  # tools belong to the system prompt
    "{% for m in messages %}{% if m.role == 'system' and tools %}"
    "{{ '<|system|>' + m.content + '<|tool|>' }}{{ tools | tojson }}{{ '<|/tool|><|end|>' }}{% else %}{{ '<|' + m.role + '|>' }}"
    "{% if m.role == 'assistant' %}⟦{% endif %}{{ m.content + '<|end|>' }}{% if m.role == 'assistant' %}⟧{% endif %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)  # fmt: skip
SMOLLM3 = (  # a system prompt of its own, with a date; without thoughts, an empty one in each turn
    "{% set off = " + _OFF + " %}{{ '<|im_start|>system\nToday Date: ' + strftime_now('%d %B %Y') + '\nReasoning Mode: ' + "
    "('/no_think' if off else '/think') + '\n\n' }}{% if messages[0].role == 'system' %}{{ messages[0].content.rstrip() }}"
    "{% endif %}{% if tools %}{{ '\n<tools>' }}{% for tool in tools %}{{ tool | string }}{% endfor %}{{ '</tools>' }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% for m in messages %}{% set content = m.content if m.content is string else '' %}"
    "{% if m.role == 'user' %}{{ '<|im_start|>user\n' + content + '<|im_end|>\n' }}{% elif m.role == 'assistant' %}"
    "{{ '<|im_start|>assistant\n' }}{% if off %}{{ '<think>\n\n</think>\n' }}{% endif %}⟦{{ content.lstrip('\n') }}" + _CALLS
    + "{{ '<|im_end|>' }}⟧{{ '\n' }}{% elif m.role == 'tool' %}{{ '<|im_start|>user\n' + content + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% if off %}{{ '<think>\n\n</think>\n' }}{% endif %}"
    "{% endif %}"
)  # fmt: skip
ZEPHYR = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<|user|>\n' + m.content + eos_token }}{% elif m.role == 'system' %}"
    "{{ '<|system|>\n' + m.content + eos_token }}{% elif m.role == 'assistant' %}{{ '<|assistant|>\n' }}⟦{{ m.content + eos_token }}⟧"
    "{% endif %}{% if loop.last and add_generation_prompt %}{{ '\n<|assistant|>\n' }}{% elif not loop.last %}{{ '\n' }}{% endif %}"
    "{% endfor %}"
)  # fmt: skip
VICUNA = (  # no special tokens, and the end of a turn only between turns
    "{% for m in messages %}{% if m.role == 'system' %}{{ m.content + '\n' }}{% elif m.role == 'user' %}"
    "{{ 'USER: ' + m.content + '\n' }}{% else %}{{ 'ASSISTANT:' }}⟦{{ ' ' + m.content }}"
    "{% if not loop.last or add_generation_prompt %}{{ '</s>' }}{% endif %}⟧"
    "{% if not loop.last or add_generation_prompt %}{{ '\n' }}{% endif %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)  # fmt: skip

FAMILIES = {
    "chatml": Family(CHATML),
    "qwen2.5": Family(QWEN25, tools=True),
    "qwen3": Family(QWEN3, tools=True, stable=False),
    "qwen3-thinking": Family(QWEN3_THINKING, tools=True, stable=False),
    "hermes": Family(HERMES, tools=True),
    "llama2": Family(LLAMA2),
    "llama3": Family(LLAMA3),
    "llama3.1": Family(LLAMA31, tools=True),
    "gemma": Family(GEMMA),
    "mistral": Family(MISTRAL, tools=True, stable=False),
    "gpt-oss": Family(GPT_OSS, tools=True, stable=False),
    "deepseek-v3": Family(DEEPSEEK_V3, tools=True),
    "deepseek-r1": Family(DEEPSEEK_R1, tools=True, stable=False),
    "glm4": Family(GLM4, tools=True, stable=False),
    "kimi": Family(KIMI, tools=True),
    "phi3": Family(PHI3, stable=False),
    "phi4": Family(PHI4),
    "smollm3": Family(SMOLLM3, tools=True),
    "zephyr": Family(ZEPHYR),
    "vicuna": Family(VICUNA, stable=False),
}
SPECIAL = (
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>",
    "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "[gMASK]", "<sop>",
    "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|im_system|>", "<|im_middle|>", "<|im_user|>",
    "<|im_assistant|>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool|>", "<|/tool|>",
)  # fmt: skip
"""Special tokens of all of them."""
ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Tokens of their own that are not special."""
