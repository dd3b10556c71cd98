"""Files of unmodified programs: found, watched, read ahead, and placed where they open fastest."""
