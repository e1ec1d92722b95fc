"""Parts of the report: reading a run folder, tables, plots, templates. No model runs here."""
