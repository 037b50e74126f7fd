"""What the records teach about confidence and length: temperatures, step costs, thresholds.

Called by the service's calibration job and after each training run.  It never touches models, files or SQL.
"""
