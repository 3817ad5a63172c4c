"""The sending side: sessions, transmission, retransmission and who is answered."""
