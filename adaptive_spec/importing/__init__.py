"""Everything that is remembered: tables, the writer, traces and the queries.  No other room speaks SQL."""
