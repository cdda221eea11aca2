// Where a request stands, and what that alone implies.
//
// Thread safety: values and pure functions.

#ifndef TOKENSPEED_SCHEDULER_REQUEST_STATE_H_
#define TOKENSPEED_SCHEDULER_REQUEST_STATE_H_

#include <cstdint>

#include "scheduler/scheduler_config.h"

namespace tokenspeed {

enum class RequestState : uint8_t {
  kBootstrapping,          // roles P and D: the handshake with the peer is not done
  kSubmitted,
  kPrefilling,
  kRemotePrefilling,       // role D: the peer writes the blocks
  kPrefillAwaitingResult,  // role P: the last chunk is scheduled, its token has not landed
  kPrefillDone,
  kDecoding,               // role P: handed off, the peer has not confirmed
  kRetracted,
  kFinished,
};
inline constexpr int kNumRequestStates = 9;

// Holds blocks and a request slot.
constexpr bool HoldsCache(RequestState state) {
  return state == RequestState::kPrefilling || state == RequestState::kRemotePrefilling ||
         state == RequestState::kPrefillAwaitingResult || state == RequestState::kPrefillDone ||
         state == RequestState::kDecoding;
}

// The next step is a decode, or the hand-off to the peer.
constexpr bool HasCompletePrefill(RequestState state) {
  return state == RequestState::kPrefillDone || state == RequestState::kDecoding;
}

// A transfer between the workers may touch the request's blocks. A function of state, so that nothing has to be undone.
constexpr bool IsPdPinned(SchedulerConfig::Role role, RequestState state) {
  switch (role) {
    case SchedulerConfig::Role::kPrefill:
      return HoldsCache(state);
    case SchedulerConfig::Role::kDecode:
      return state == RequestState::kRemotePrefilling;
    case SchedulerConfig::Role::kFused:
      break;
  }
  return false;
}

}  // namespace tokenspeed

#endif  // TOKENSPEED_SCHEDULER_REQUEST_STATE_H_
