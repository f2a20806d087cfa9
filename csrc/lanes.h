// A step that is shared out by rows. With many rows that each belong to a sequence of their own (decoding), a thread
// takes some sequences through all layers alone: it waits for nobody and reads nothing that another has just written,
// at the price of reading all weights. Only the head's product is for whoever has time: threads seldom get through the
// layers together. Else they share every product, as Step does.
#pragma once

#include <vector>

#include "step.h"

namespace kvloom {

class Lanes {
public:
    explicit Lanes(Step whole) : whole_(std::move(whole)) {}

    // To change the model; lanes are made anew from it.
    Step& change() {
        lanes_.clear();
        return whole_;
    }

    // As Step::run.
    int64_t run(const StepInput& input);

    // Runs that were shared out by rows.
    int64_t by_rows() const { return by_rows_; }

    // As Step::take_times; of threads that worked apart, the mean.
    Step::Times take_times();

private:
    struct Lane {
        Step step;
        int first, end;  // of the batch's sequences, each with one row
        std::vector<int64_t> rows;
        StepInput input;
    };
    struct Work;

    bool cut(const StepInput& input);
    void fill(Lane& lane, const StepInput& input);

    Step whole_;
    std::vector<Lane> lanes_;
    int64_t by_rows_ = 0;
    double head_seconds_ = 0;  // as Step::Times
};

}  // namespace kvloom
