"""A draft cut out of its target, healed by distillation on text that the target writes by itself."""
