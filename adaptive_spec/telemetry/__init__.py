"""What a process tells of itself while it runs: metrics, spans, and the fields of its log lines.

The rooms above report here; nothing here knows of them, of the database or of HTTP.  ``serving`` hands it out.
"""
