"""featcal inside other libraries: one module each, imported only by those who use that library."""
