"""Messages to users whose notebook tab is closed, as Jinja templates: an admin can write others.

The names in them are in docs/reference/notifiers.md.
"""

from __future__ import annotations

DEFAULT_SUBJECT = (
    "{% if action == 'stop' %}Your notebook server will stop{% else %}Your GPU share will be {{ action }}d{% endif %} "
    "at {{ time }}"
)
DEFAULT_TEXT = """\
Hello {{ user }},

{% if action == 'stop' %}
your notebook server{% if server %} {{ server }}{% endif %} will stop at {{ time }}, in {{ minutes }} min.
{% else %}
the GPU share of your notebook server{% if server %} {{ server }}{% endif %} will be {{ action }}d at {{ time }}, in \
{{ minutes }} min.
{% endif %}
{{ explanation }}

{% if can_keep %}
To keep {% if action == 'stop' %}the server, open your notebook and run a cell{% else %}the share, open your notebook \
and run a cell that uses the GPU{% endif %}{% if dashboard %}, or keep the share on the dashboard{% endif %}.
{% endif %}
{% if dashboard %}
{{ dashboard }}
{% endif %}
"""
