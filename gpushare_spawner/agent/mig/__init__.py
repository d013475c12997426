"""MIG on one machine: sessions have the instances that the admin has made."""
