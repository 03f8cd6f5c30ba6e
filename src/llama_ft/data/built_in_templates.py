"""Chat templates for --chat_template NAME. The {% generation %} blocks are what --labels assistant trains on."""

# The wording of Stanford Alpaca's headings; special tokens the tokenizer lacks render as nothing.
ALPACA = (
    "{{ bos_token or '' }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}"
    "{{ '### Instruction:\n' + message['content'] + '\n\n' }}"
    "{% elif message['role'] == 'assistant' %}"
    "{{ '### Response:\n' }}"
    "{% generation %}{{ message['content'] + (eos_token or '') }}{% endgeneration %}"
    "{% if not loop.last %}{{ '\n\n' }}{% endif %}"
    "{% elif message['role'] == 'tool' %}"
    "{{ '### Input:\n' + message['content'] + '\n\n' }}"
    "{% else %}"
    "{{ message['content'] + '\n\n' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}"
)

# Llama 3.1's layout: a call is JSON of name and parameters, what it returns has the role ipython.
LLAMA3 = """
{%- macro head(role) -%}
{{ '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}
{%- endmacro -%}
{{- '<|begin_of_text|>' }}
{%- set has_system = messages[0].role == 'system' %}
{%- if has_system or tools %}
    {{- head('system') + (messages[0].content | trim if has_system else '') }}
    {%- if tools %}
        {{- '\n\n' if has_system else '' }}
        {{- 'You can call these functions. To call one, answer only with ' }}
        {{- '{"name": its name, "parameters": its arguments by name}.' }}
        {%- for tool in tools %}
            {{- '\n\n' + tool | tojson(indent=4) }}
        {%- endfor %}
    {%- endif %}
    {{- '<|eot_id|>' }}
{%- endif %}
{%- for message in (messages[1:] if has_system else messages) %}
    {%- if message.role == 'assistant' %}
        {{- head('assistant') }}
        {%- generation %}
            {{- message.content | trim }}
            {%- for call in (message.tool_calls or []) %}
                {%- set call = call.function or call %}
                {{- '\n' if message.content or not loop.first else '' }}
                {{- '{"name": ' + call.name | tojson + ', "parameters": ' + call.arguments | tojson + '}' }}
            {%- endfor %}
            {{- '<|eot_id|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- head('ipython' if message.role == 'tool' else message.role) + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- head('assistant') }}
{%- endif %}
"""

# ChatML with the tools of Hermes and Qwen.
CHATML = """
{%- set has_system = messages[0].role == 'system' %}
{%- if has_system or tools %}
    {{- '<|im_start|>system\n' + (messages[0].content if has_system else '') }}
    {%- if tools %}
        {{- '\n\n' if has_system else '' }}
        {{- 'You can call the functions whose signatures stand between <tools> and </tools>. To call one, write\n' }}
        {{- '<tool_call>\n{"name": its name, "arguments": its arguments by name}\n</tool_call>\n<tools>' }}
        {%- for tool in tools %}
            {{- '\n' + tool | tojson }}
        {%- endfor %}
        {{- '\n</tools>' }}
    {%- endif %}
    {{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in (messages[1:] if has_system else messages) %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
            {{- message.content }}
            {%- for call in (message.tool_calls or []) %}
                {%- set call = call.function or call %}
                {{- '\n' if message.content or not loop.first else '' }}
                {{- '<tool_call>\n{"name": ' + call.name | tojson + ', "arguments": ' + call.arguments | tojson }}
                {{- '}\n</tool_call>' }}
            {%- endfor %}
            {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
    {%- else %}
        {{- message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""

# Mistral's version 3. There is no system role: the first user turn begins with it.
MISTRAL = """
{%- set has_system = messages[0].role == 'system' %}
{{- bos_token or '' }}
{%- if tools %}
    {{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{%- for message in (messages[1:] if has_system else messages) %}
    {%- if message.role == 'assistant' %}
        {%- generation %}
            {%- if message.content %}
                {{- ' ' + message.content }}
            {%- endif %}
            {%- if message.tool_calls %}
                {{- '[TOOL_CALLS] [' }}
                {%- for call in message.tool_calls %}
                    {%- set function = call.function or call %}
                    {{- '{"name": ' + function.name | tojson + ', "arguments": ' + function.arguments | tojson }}
                    {{- (', "id": ' + call.id | tojson if call.id else '') + ('}' if loop.last else '}, ') }}
                {%- endfor %}
                {{- ']' }}
            {%- endif %}
            {{- eos_token or '' }}
        {%- endgeneration %}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | tojson }}
        {{- (', "call_id": ' + message.tool_call_id | tojson if message.tool_call_id else '') + '}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- '[INST] ' + (messages[0].content + '\n\n' if has_system and loop.first else '') }}
        {{- message.content + '[/INST]' }}
    {%- endif %}
{%- endfor %}
"""

BUILT_IN = {"llama3": LLAMA3, "chatml": CHATML, "alpaca": ALPACA, "mistral": MISTRAL}
