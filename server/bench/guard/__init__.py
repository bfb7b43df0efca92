"""What ``unbind bench guard`` measures: whether anything gets past the guard, what it bars without need, and what it costs."""
