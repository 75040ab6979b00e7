"""Who somebody is and what they have signed: keys, certificates, SSHSIG signatures, requests. Nothing is read or sent here."""
