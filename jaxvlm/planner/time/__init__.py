"""Step time by a roofline model: work, communication, overlap."""
