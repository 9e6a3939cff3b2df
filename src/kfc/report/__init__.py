"""Tables and pages made from runs."""
