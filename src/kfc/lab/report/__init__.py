"""Reports: tables, figures and self-contained HTML pages about runs and inspected networks."""
