"""What the records teach about confidence and length: temperatures, step costs, thresholds.

Called by the service's calibration job and after each training run.  Never touches models or files; SQL is the records'.
"""
