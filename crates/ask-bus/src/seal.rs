//! Sealing of secrets: HPKE (RFC 9180) with X25519, HKDF-SHA256 and ChaCha20-Poly1305.
//!
//! A secret reply is sealed to the gateway's public key as soon as it arrives, bound to its
//! question and reply, and opened only by the gateway's adapters.

use std::fmt;

use ask_core::key::QuestionKey;
use ask_core::reply::Sealed;
use base64::Engine;
use base64::engine::general_purpose::STANDARD_NO_PAD as BASE64;
use hpke::aead::ChaCha20Poly1305;
use hpke::kdf::HkdfSha256;
use hpke::kem::X25519HkdfSha256;
use hpke::{Deserializable, Kem, OpModeR, OpModeS, Serializable};
use zeroize::{Zeroize, Zeroizing};

use crate::adapters::SealKey;

const INFO: &[u8] = b"askbus secret reply v1";

/// The private half of a gateway's seal key. Only adapters hold it.
pub struct OpenKey {
    key_id: String,
    private: <X25519HkdfSha256 as Kem>::PrivateKey,
}

impl fmt::Debug for OpenKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OpenKey({})", self.key_id)
    }
}

/// A secret could not be sealed or opened. It never says anything about the secret.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SealError {
    /// The key can't be read.
    #[error("the seal key is not valid; run `askctl provision` again")]
    BadKey,
    /// It was sealed to another key.
    #[error("the secret was sealed to the key {sealed_to}, and this adapter holds {held}")]
    OtherKey {
        /// The key it was sealed to.
        sealed_to: String,
        /// The key at hand.
        held: String,
    },
    /// It does not belong to this question and reply, or was changed.
    #[error("the sealed secret does not belong to this question and reply")]
    NotAuthentic,
}

impl OpenKey {
    /// Makes a new key, and the public half to publish.
    ///
    /// # Errors
    /// When the system gives no randomness.
    pub fn generate() -> Result<(Self, SealKey), SealError> {
        let (private, public) = X25519HkdfSha256::gen_keypair();
        let public = public.to_bytes();
        let key_id: String = public.iter().take(4).map(|b| format!("{b:02x}")).collect();
        let seal = SealKey { key_id: key_id.clone(), public: BASE64.encode(public) };
        Ok((Self { key_id, private }, seal))
    }

    /// Reads what [`OpenKey::to_text`] wrote.
    ///
    /// # Errors
    /// [`SealError::BadKey`] for anything else.
    pub fn from_text(text: &str) -> Result<Self, SealError> {
        let (key_id, private) = text.trim().split_once(':').ok_or(SealError::BadKey)?;
        let bytes = Zeroizing::new(BASE64.decode(private).map_err(|_| SealError::BadKey)?);
        let private =
            <X25519HkdfSha256 as Kem>::PrivateKey::from_bytes(&bytes).map_err(|_| SealError::BadKey)?;
        Ok(Self { key_id: key_id.into(), private })
    }

    /// The key as text for a file that only the adapter may read.
    pub fn to_text(&self) -> Zeroizing<String> {
        let mut bytes = self.private.to_bytes();
        let text = Zeroizing::new(format!("{}:{}\n", self.key_id, BASE64.encode(bytes)));
        bytes.as_mut_slice().zeroize();
        text
    }

    /// The public half.
    pub fn seal_key(&self) -> SealKey {
        let public = X25519HkdfSha256::sk_to_pk(&self.private).to_bytes();
        SealKey { key_id: self.key_id.clone(), public: BASE64.encode(public) }
    }

    /// Opens a secret of this question and reply.
    ///
    /// # Errors
    /// [`SealError`], without a word about the secret.
    pub fn open(
        &self,
        sealed: &Sealed,
        question: &QuestionKey,
        reply: &str,
    ) -> Result<Zeroizing<String>, SealError> {
        if sealed.key_id != self.key_id {
            return Err(SealError::OtherKey { sealed_to: sealed.key_id.clone(), held: self.key_id.clone() });
        }
        let encapsulated = BASE64.decode(&sealed.encapsulated).map_err(|_| SealError::NotAuthentic)?;
        let encapsulated = <X25519HkdfSha256 as Kem>::EncappedKey::from_bytes(&encapsulated)
            .map_err(|_| SealError::NotAuthentic)?;
        let ciphertext = BASE64.decode(&sealed.ciphertext).map_err(|_| SealError::NotAuthentic)?;
        let opened = hpke::single_shot_open::<ChaCha20Poly1305, HkdfSha256, X25519HkdfSha256>(
            &OpModeR::Base,
            &self.private,
            &encapsulated,
            INFO,
            &ciphertext,
            &bound_to(question, reply),
        );
        let bytes = opened.map_err(|_| SealError::NotAuthentic)?;
        String::from_utf8(bytes).map(Zeroizing::new).map_err(|_| SealError::NotAuthentic)
    }
}

impl SealKey {
    /// Seals a secret for this question and reply.
    ///
    /// # Errors
    /// [`SealError::BadKey`] when the published key can't be read.
    pub fn seal(&self, secret: &str, question: &QuestionKey, reply: &str) -> Result<Sealed, SealError> {
        let public = BASE64.decode(&self.public).map_err(|_| SealError::BadKey)?;
        let public =
            <X25519HkdfSha256 as Kem>::PublicKey::from_bytes(&public).map_err(|_| SealError::BadKey)?;
        let sealed = hpke::single_shot_seal::<ChaCha20Poly1305, HkdfSha256, X25519HkdfSha256>(
            &OpModeS::Base,
            &public,
            INFO,
            secret.as_bytes(),
            &bound_to(question, reply),
        );
        let (encapsulated, ciphertext) = sealed.map_err(|_| SealError::BadKey)?;
        Ok(Sealed {
            key_id: self.key_id.clone(),
            encapsulated: BASE64.encode(encapsulated.to_bytes()),
            ciphertext: BASE64.encode(ciphertext),
        })
    }
}

fn bound_to(question: &QuestionKey, reply: &str) -> Vec<u8> {
    format!("{question}\n{reply}").into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn question(id: &str) -> QuestionKey {
        format!("g.s.r.{id}").parse().unwrap()
    }

    #[test]
    fn only_the_gateways_key_opens_a_secret_of_the_same_question_and_reply() {
        let (open, seal) = OpenKey::generate().unwrap();
        let sealed = seal.seal("hunter2", &question("q"), "r1").unwrap();
        assert_eq!(*open.open(&sealed, &question("q"), "r1").unwrap(), "hunter2");
        assert_eq!(open.open(&sealed, &question("q"), "r2"), Err(SealError::NotAuthentic));
        assert_eq!(open.open(&sealed, &question("p"), "r1"), Err(SealError::NotAuthentic));
        let (other, _) = OpenKey::generate().unwrap();
        assert!(matches!(other.open(&sealed, &question("q"), "r1"), Err(SealError::OtherKey { .. })));
    }

    #[test]
    fn a_key_reads_back_from_its_file() {
        let (open, seal) = OpenKey::generate().unwrap();
        let again = OpenKey::from_text(&open.to_text()).unwrap();
        assert_eq!(again.seal_key(), seal);
        assert_eq!(OpenKey::from_text("nonsense").unwrap_err(), SealError::BadKey);
    }

    #[test]
    fn neither_key_nor_secret_shows_when_formatted() {
        let (open, seal) = OpenKey::generate().unwrap();
        let sealed = seal.seal("hunter2", &question("q"), "r1").unwrap();
        let shown = format!("{open:?} {sealed:?}");
        let private = open.to_text();
        assert!(
            !shown.contains(&sealed.ciphertext) && !shown.contains(private.trim().split(':').nth(1).unwrap())
        );
    }
}
